"""What runs on the host: requests in, text out."""
