"""The HTP flavour of the decoder graph: static shapes, standard operators."""
