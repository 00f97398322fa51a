"""Text in and out: tokenizers, both chat formats, tool declarations and calls."""
