"""The server: OpenAI's protocol over rows in flight, and a page to watch them."""
