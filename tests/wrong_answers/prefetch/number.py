"""Wrong answers to prefetch.number: 12 units that compute for 8 ms, and whose gathers take 5."""

from wrong_answers import wrong

wrong("that is without prefetch", 12 * (8 + 5), mistake="adds what runs side by side")
wrong("that is the computing alone", 12 * 8, mistake="forgets the first gather")
wrong("that is the link alone", 12 * 5, mistake="counts the gathers only")
wrong("the first gather and the last computing are missing", 11 * 8, mistake="counts only where the two run side by side")
wrong("side by side takes as long as the longer", 5 + 11 * 5 + 8, mistake="takes the shorter of the two")
wrong("the longer of the two counts L − 1 times", 12 * 8 + 8 + 5, mistake="counts one more of the longer")
wrong("worked out line by line", 100, mistake="is one off")
