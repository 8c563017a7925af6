"""Serving: an engine that other programs call over HTTP, with OpenAI's protocol. Explained in chapter 16."""
