"""Between two vocabularies: exact bytes, spellings, the trie, and following a context."""
