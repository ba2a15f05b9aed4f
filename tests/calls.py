"""Cost in calls of functions, which does not depend on what else the machine does."""

from cProfile import Profile


class CountedCalls(Profile):
    """Counts the calls of functions, of Python and of C, in a `with` block of this thread."""

    @property
    def count(self) -> int:
        return sum(entry.callcount for entry in self.getstats())
