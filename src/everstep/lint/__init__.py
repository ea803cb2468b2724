"""Finding the most common mistakes in workflows and steps by reading their source. Nothing is imported or run.

Start at `everstep.lint.linting`: it reads a file (`module`), finds which functions are workflow code and which are the
bodies of steps (`reach`), and calls the rules, one module for each subject.
"""
