"""What training libraries need of logitless beyond a call: docs/recipes says which library needs what.

``trl`` scores tokens where TRL's trainers do; ``torchtune`` is a loss of torchtune's interface; ``verl`` computes the
outputs of verl's fused heads. None of them imports the library it is for before it is asked to change something of it.
"""
