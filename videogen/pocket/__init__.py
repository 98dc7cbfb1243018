"""pocket-h3: the real MiniMax-H3 classes at toy size, trained on rendered scenes."""
