"""A tokenized corpus on the disk: shards of ArrayRecord, an index, and a manifest.

DIR/sources.jsonl           size, time and digest of each source file; written first
DIR/plan.json               what is made of which files
DIR/00000.array_record, …   one record per document: its ids, uint16 or uint32, little-endian;
                            behind those of a conversation its mask, a byte per token
DIR/parts/00000.npz, …      length, digest and MinHash keys of each document of a shard
DIR/index.npz               where each training and held-out document lies, without duplicates
DIR/manifest.json           sources, tokenizer, layout, counts, skipped files; written last

A shard holds documents of one source and depends on that source's files alone. So it is the same
whichever process makes it, however often the work is killed. Files are written aside and renamed.
"""
