"""Wrong answers to collectives.number, seed 0: 7 B parameters in fp16, 64 ranks, 50 GB/s."""

from wrong_answers import wrong

wrong("one of the two trips is missing", 275.625, mistake="14 GB × 63/64 / 50 GB/s: counts the reduce-scatter alone")
wrong("does not send its own chunk", 560.0, mistake="2 × 14 GB / 50 GB/s: forgets (N − 1)/N")
wrong("the naive ways send", 17640.0, mistake="63 × 14 GB / 50 GB/s: the naive ways' cost")
wrong("that is in seconds", 0.55125, mistake="gives seconds")
wrong("are bytes, not bits", 4410.0, mistake="takes GB/s for Gbit/s")
