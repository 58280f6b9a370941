"""A judge with scripted answers: an OpenAI-compatible endpoint on its own port."""

import contextlib
import http.server
import json
import threading


@contextlib.contextmanager
def judging_with(answer_to):
    """A judge's URL and what it was asked; ``answer_to`` gives status, content and headers."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = body["messages"][0]["content"]
            asked.append((self.path, said, self.headers.get("Authorization")))
            status, content, headers = answer_to(said)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            message = {"choices": [{"message": {"content": content}}]}
            self.wfile.write(json.dumps(message).encode())

        do_GET = do_POST

        def log_message(self, *_):
            """Logs nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
