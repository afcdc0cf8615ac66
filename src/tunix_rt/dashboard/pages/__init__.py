"""One module per page: plain values in, a `Page` out. No HTTP, no HTML."""
