"""Every architecture that transformers can train, tried: the evidence for "no model-specific code".

The one place in the repository where architectures have names, and then only in tables of sizes and inputs. The package
knows nothing of it.
"""

import zoo.torchvision_operators  # noqa: F401  (before torchmetrics, which imports torchvision if there is one)
