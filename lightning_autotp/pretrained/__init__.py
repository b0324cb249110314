"""Models of transformers without memory: ``from_pretrained`` that reads no weights, and files from the Hub."""
