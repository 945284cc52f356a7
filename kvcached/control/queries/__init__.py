"""What commands and the API find out about a ledger directory; how it is shown is decided elsewhere."""
