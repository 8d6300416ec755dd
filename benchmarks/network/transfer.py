"""One end of a plain transfer: send to one address, receive at another, print the bit/s received.

    python transfer.py OWN_ADDRESS PEER_ADDRESS BYTES

It needs nothing but Python, so that what it measures is the network.
"""

import socket
import sys
import threading
import time

PORT = 5001
CHUNK = 1 << 20


def connect(address: str) -> socket.socket:
    """Connect to a peer that may still be starting."""
    for _ in range(200):
        peer = socket.socket()
        if peer.connect_ex((address, PORT)) == 0:
            return peer
        peer.close()
        time.sleep(0.05)
    raise ConnectionRefusedError(f"nobody listens at {address}")


def send(peer: socket.socket, size: int) -> None:
    """Send zeros and close."""
    with peer:
        for start in range(0, size, CHUNK):
            peer.sendall(bytes(min(CHUNK, size - start)))


def receive(peer: socket.socket, size: int) -> float:
    """Bit/s of what follows the first bytes to arrive."""
    buffer = bytearray(CHUNK)
    first = peer.recv_into(buffer)
    started, received = time.perf_counter(), first
    while received < size:
        arrived = peer.recv_into(buffer)
        if not arrived:
            raise ConnectionError(f"only {received} of {size} bytes arrived")
        received += arrived
    return 8 * (received - first) / (time.perf_counter() - started)


def main() -> None:
    """Exchange with both neighbours at once."""
    own, other, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with socket.create_server((own, PORT)) as server:
        sender = threading.Thread(target=send, args=(connect(other), size))
        peer, _ = server.accept()
        sender.start()
        with peer:
            print(receive(peer, size))
        sender.join()


if __name__ == "__main__":
    main()
