"""Block fine-tuning (TurboRAG section 3.3, Block-Attention section 2.4), and training from scratch.

The forward pass, the rule of visibility and the layouts are those of inference; a sample read in
full and in block mode differs in data only, so one compiled step trains both.
"""
