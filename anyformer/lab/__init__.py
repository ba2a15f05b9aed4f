"""The lab: experiments about claims on Transformers, and grids that compare settings under an equal budget.

alone         Timed measurements run alone
api           The stable names of grids and comparisons
cells         Run many measurements in parallel and store each result as soon as it is done
claims        Claims on a shared folder: each cell is trained by one worker at a time
compare       Compare the settings of a grid: mean ± deviation over seeds, and p values
comparison    runs beside each other on the same examples
coordinates   Coordinate check of width transfer: sizes of activations by width
decision      Conditions of a claim, tested over seeds, and the verdict
evaluation    public task files; lm-evaluation-harness
experiment    The family of experiments: a claim, cells, measurement, verdict
figures       Figures that are readable in grey and for the colour-blind
grid          Train all combinations of settings of a recipe under an equal budget
measurements  Measure several experiments together
ray_engine    Measure cells on a Ray cluster
rules         Hash of the rule of a claim
stats         Mean and deviation, Welch's t-test, Holm's correction, effect size, power-law fit
trial         One training run as a measurement
"""
