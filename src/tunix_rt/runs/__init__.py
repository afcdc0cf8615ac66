"""The files of a run folder and of a bundle: their declared shapes, their checksums, and the one reader that opens them."""
