"""Timm's classifiers of pictures."""

from __future__ import annotations

from timm.models.convnext import ConvNeXt
from timm.models.eva import Eva
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnet import Bottleneck, ResNet
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
)  # fmt: skip
