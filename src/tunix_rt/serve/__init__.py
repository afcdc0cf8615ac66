"""An OpenAI-compatible endpoint on this computer: requests, the thread that decodes, and the application."""
