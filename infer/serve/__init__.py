"""The server: OpenAI's protocol over HTTP, and a page to try methods on."""
