"""adasim: which speculative-decoding policy pays, at which load, and how sure are we?"""

__version__ = "0.1.0"
