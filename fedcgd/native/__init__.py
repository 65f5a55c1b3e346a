"""C code of the package: how it is loaded, and the operations over whole models that are made of it."""
