"""Parts of autochunk that PyTorch and JAX share. They write statements of the compiler's text form, parse the compiled
text and choose a program that meets a budget. This package imports neither framework."""
