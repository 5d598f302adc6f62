"""How well `hpcpace probe` measures a lab whose links are known, and finds those that are slow."""
