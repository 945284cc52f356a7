"""Requests and recorded traces of them, as the embedded engine replays them and the advisor reads them."""
