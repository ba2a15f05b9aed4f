"""The lab: claims about Transformers put to the test, and comparisons of one's own under an equal budget.

cells        Many small measurements, side by side, each kept as soon as it is done
compare      What a grid found, side by side
experiment   A claim, and how it is put to the test
experiments  Claims, one file each
figures      Figures that print in grey and that the colour-blind can read
grid         Comparing settings on a recipe under an equal budget
report       Pages from results
stats        The few statistics that verdicts need
trial        One training as a measurement
"""
