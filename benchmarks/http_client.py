"""Clients of a server in a separate process: python -m benchmarks.http_client PORT PATH FILE CLIENTS

Each line of the file is the JSON body of a request. They are sent twice; the seconds of the second time are printed.
"""

import http.client
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path


def send_all(port: int, path: str, bodies: list[str], clients: int) -> float:
    """Send requests by several clients at once, and return the seconds until the last answer."""
    lock, left = threading.Lock(), iter(bodies)

    def each() -> Iterator[str]:
        while True:
            with lock:
                body = next(left, None)
            if body is None:
                return
            yield body

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for body in each():
            connection.request("POST", path, body.encode(), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            assert response.status == 200, text

    threads = [threading.Thread(target=client) for _ in range(clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


if __name__ == "__main__":
    port, path, file, clients = sys.argv[1:]
    bodies = Path(file).read_text(encoding="utf-8").splitlines()
    send_all(int(port), path, bodies, int(clients))
    print(send_all(int(port), path, bodies, int(clients)))
