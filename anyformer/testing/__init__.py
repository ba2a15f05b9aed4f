"""Laws of parts, yours or ours: everything that a part does not have to know, and still has to get right.

    anyformer.testing.check_part(Kerple)      # AssertionError with all laws that do not hold
    anyformer check my_parts.py               # the same as a table, for all parts in a file

check    The families and their laws; reports
laws     Laws of a part by itself
reading  Laws of what tokens read
split    The law of tensor parallelism, in two processes
subject  Small models with a part
"""

from anyformer.testing.check import Report as Report, check_part as check_part, run_laws as run_laws
