"""Timm's classifiers of pictures."""

from __future__ import annotations

import timm
from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.convnext import ConvNeXt
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.mlp_mixer import MlpMixer
from timm.models.regnet import RegNet, RegNetCfg
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer

from zoo.packages.entry import CLASSES, HEADS, HIDDEN, Entry, classified, pictures

_PATCHES = {"img_size": 32, "patch_size": 8, "num_classes": CLASSES}
_TRANSFORMER = {**_PATCHES, "embed_dim": HIDDEN, "depth": 2, "num_heads": HEADS}

MODELS = (
    Entry("VisionTransformer", lambda: VisionTransformer(**_TRANSFORMER), pictures(32), classified),
    Entry(
        "VisionTransformer, QK norms, registers",
        lambda: VisionTransformer(**_TRANSFORMER, qk_norm=True, reg_tokens=2, init_values=0.1, global_pool="avg"),
        pictures(32),
        classified,
    ),
    Entry(
        "VisionTransformer, attention pooling",
        lambda: VisionTransformer(**_TRANSFORMER, global_pool="map", class_token=False),
        pictures(32),
        classified,
    ),
    Entry("DeiT, distilled", lambda: VisionTransformerDistilled(**_TRANSFORMER), pictures(32), classified),
    Entry(
        "BEiT",
        lambda: Beit(**_TRANSFORMER, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1),
        pictures(32),
        classified,
    ),
    Entry("CaiT", lambda: Cait(**_TRANSFORMER, depth_token_only=1, init_values=0.1), pictures(32), classified),
    Entry(
        "Eva",
        lambda: Eva(**_TRANSFORMER, mlp_ratio=8 / 3, swiglu_mlp=True, use_rot_pos_emb=True, qkv_fused=False),
        pictures(32),
        classified,
    ),
    Entry(
        "SwinTransformer",
        lambda: SwinTransformer(
            img_size=32, patch_size=4, num_classes=CLASSES, embed_dim=32, depths=(2, 2), num_heads=(2, 4),
            window_size=4, drop_path_rate=0.0,
        ),
        pictures(32),
        classified,
    ),
    Entry(
        "ConvNeXt",
        lambda: ConvNeXt(num_classes=CLASSES, depths=(1, 1, 1, 1), dims=(16, 32, 48, 64), ls_init_value=0.1),
        pictures(64),
        classified,
    ),
    Entry("MlpMixer", lambda: MlpMixer(**_PATCHES, num_blocks=2, embed_dim=HIDDEN), pictures(32), classified),
    Entry(
        "ResNet",
        lambda: ResNet(Bottleneck, (1, 1, 1, 1), num_classes=CLASSES, channels=(16, 32, 48, 64)),
        pictures(64),
        classified,
    ),
    Entry(
        "ResNet, basic blocks, squeeze and excitation",
        lambda: ResNet(
            BasicBlock, (1, 1, 1, 1), num_classes=CLASSES, channels=(16, 32, 48, 64), block_args={"attn_layer": "se"}
        ),
        pictures(64),
        classified,
    ),
    Entry(
        "RegNetY",
        lambda: RegNet(
            RegNetCfg(depth=6, w0=16, wa=16.0, wm=1.8, group_size=8, se_ratio=0.25), num_classes=CLASSES,
            zero_init_last=False,
        ),
        pictures(64),
        classified,
    ),
    Entry("MobileNetV3", lambda: timm.create_model("mobilenetv3_small_050", num_classes=CLASSES), pictures(64),
          classified),
    Entry("EfficientNet", lambda: timm.create_model("efficientnet_b0", num_classes=CLASSES), pictures(64), classified),
)  # fmt: skip
