"""What autochunk is in PyTorch and in JAX: statements of the compiler's text form, its text read back, the choice of a
program that meets a budget. Needs neither framework."""
