"""Flower as courier: bytes from the server's sockets to the parties' sockets and back. Nothing here reads them."""
