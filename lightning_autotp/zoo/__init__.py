"""Every architecture that transformers can train, tried: the evidence for "no model-specific code".

The one place in the package where architectures have names, and then only in tables of sizes and inputs. It sits on top
of everything else; nothing but the command line imports it.
"""
