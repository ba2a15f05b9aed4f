"""Data sets of the built-in recipes: a registry, small sets inside the package, and downloads. Imports no torch.

download  upstream files by HTTP or from a mirror: resumed, verified by SHA-256
registry  names, licences, addresses and checksums: registry.toml
storage   folders of data sets on this machine; unpacks the sets of bundled/
"""
