"""tunix-rt: fine-tune a language model to show its reasoning, know that it fits, leave proof. Imports nothing;
`tunix_rt.api` has its functions for Python."""

__version__ = "0.2.0"
