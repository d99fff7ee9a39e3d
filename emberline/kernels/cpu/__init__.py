"""The operations of a layer in C, compiled for this very processor when first needed."""
