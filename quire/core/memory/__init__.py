"""Memory beside the block table: window blocks, recurrent states, and pins of cached prefixes."""
