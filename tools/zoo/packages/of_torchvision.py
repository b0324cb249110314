"""Torchvision's classifiers of pictures."""

from __future__ import annotations

from torchvision.models import DenseNet, MaxVit
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig
from torchvision.models.regnet import BlockParams, RegNet
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2
from torchvision.models.vision_transformer import VisionTransformer

from zoo.packages.entry import CLASSES, HEADS, HIDDEN, Entry, classified, pictures

_WINDOWS = {
    "patch_size": [4, 4], "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4],
    "stochastic_depth_prob": 0.0, "num_classes": CLASSES,
}  # fmt: skip

MODELS = (
    Entry("VisionTransformer", lambda: VisionTransformer(32, 8, 2, HEADS, HIDDEN, 112, num_classes=CLASSES),
          pictures(32), classified),
    Entry("SwinTransformer", lambda: SwinTransformer(**_WINDOWS), pictures(32), classified),
    Entry("SwinTransformer V2",
          lambda: SwinTransformer(**_WINDOWS, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2),
          pictures(32), classified),
    Entry("MaxVit",
          lambda: MaxVit((32, 32), 16, 2, [16, 32], [1, 1], 8, stochastic_depth_prob=0.0, num_classes=CLASSES),
          pictures(32), classified),
    Entry("ConvNeXt",
          lambda: ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, 64, 1), CNBlockConfig(64, None, 1)],
                           num_classes=CLASSES),
          pictures(32), classified),
    Entry("ResNet, basic blocks", lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES),
          pictures(32), classified),
    Entry("ResNet, bottlenecks", lambda: ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES),
          pictures(32), classified),
    Entry("EfficientNet",
          lambda: EfficientNet([MBConvConfig(1, 3, 1, 16, 16, 1), MBConvConfig(4, 3, 2, 16, 24, 1),
                                MBConvConfig(6, 5, 2, 24, 40, 2)],
                               dropout=0.0, stochastic_depth_prob=0.0, num_classes=CLASSES),
          pictures(64), classified),
    Entry("EfficientNet V2",
          lambda: EfficientNet([FusedMBConvConfig(1, 3, 1, 16, 16, 1), FusedMBConvConfig(4, 3, 2, 16, 24, 1),
                                MBConvConfig(4, 3, 2, 24, 40, 2)],
                               dropout=0.0, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=160),
          pictures(64), classified),
    Entry("RegNetY", lambda: RegNet(BlockParams.from_init_params(6, 24, 16.0, 2.0, 8, se_ratio=0.25), CLASSES),
          pictures(64), classified),
    Entry("DenseNet", lambda: DenseNet(16, (2, 2, 2, 2), 32, num_classes=CLASSES), pictures(64), classified),
)  # fmt: skip
