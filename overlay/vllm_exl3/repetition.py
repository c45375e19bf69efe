"""Whether a text has run into a loop: its end repeats a short cycle. Only the end of the text is kept."""

# What people and programs write repeats too: rows of a table, lines of code, a ruler of dashes. So a cycle counts only
# when it has come round often, and when what it has filled is longer than such things usually are.
LONGEST_CYCLE = 512  # characters
LEAST_ROUNDS = 4
LEAST_LENGTH = 768  # characters that the rounds fill together
WINDOW = LEAST_ROUNDS * LONGEST_CYCLE


class Tail:
    """The last characters of a text that grows. At most twice WINDOW characters are held and copied per `add`."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, text: str) -> None:
        self.text += text[-WINDOW:]
        if len(self.text) > 2 * WINDOW:
            self.text = self.text[-WINDOW:]


def cycle_of(text: str) -> int:
    """Length in characters of the shortest cycle that the end of `text` repeats often enough; 0 if there is none."""
    for cycle in range(1, LONGEST_CYCLE + 1):
        length = max(LEAST_ROUNDS * cycle, LEAST_LENGTH)  # never less than for a shorter cycle
        if length > len(text):
            return 0
        # One character decides nearly always, before any text is copied.
        if text[-1] == text[-1 - cycle] and text[-length:-cycle] == text[cycle - length :]:
            return cycle
    return 0
