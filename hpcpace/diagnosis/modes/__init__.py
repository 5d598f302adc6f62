"""The modes of a verdict, a module each: what speaks for it, who is at fault, and what it costs."""
