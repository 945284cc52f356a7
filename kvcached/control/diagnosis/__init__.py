"""The checks of ``kvcached-control doctor``: each is a generator of findings and changes nothing."""
