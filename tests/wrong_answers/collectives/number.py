"""Wrong answers to collectives.number, seed 0: 7 B parameters in fp16, 32 ranks, 50 GB/s."""

from wrong_answers import wrong

wrong("one of the two trips", 271.25, mistake="14 GB × 31/32 / 50 GB/s: counts the reduce-scatter alone")
wrong("the 2 bytes of fp16", 271.25, mistake="2 × 7 B × 31/32 / 50 GB/s: counts elements")
wrong("does not send its own chunk", 560.0, mistake="2 × 14 GB / 50 GB/s: forgets (N − 1)/N")
wrong("the naive ways send", 8680.0, mistake="31 × 14 GB / 50 GB/s: the naive ways' cost")
wrong("that is in seconds", 0.5425, mistake="gives seconds")
wrong("are bytes, not bits", 4340.0, mistake="takes GB/s for Gbit/s")
