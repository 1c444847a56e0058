"""GGUF, the file of llama.cpp, Ollama and LM Studio: read into a folder, written from one."""
