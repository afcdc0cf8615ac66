"""Pages over run folders, plans, data, doctor and evidence: HTML and SVG made by the server, for a browser on this computer."""
