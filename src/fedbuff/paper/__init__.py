"""The paper, reproduced: one file per table or figure, each with its settings, the paper's numbers, the claim and the sum.

`experiments.py` lists them and says what one is; `cells.py` keeps what was trained; `report.py` writes docs/paper.md.
"""
