"""Every architecture that transformers can train, tried: the evidence for "no model-specific code".

The one place in the repository where architectures have names, and then only in tables of sizes and inputs. The package
knows nothing of it.
"""
