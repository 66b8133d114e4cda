"""Models to and from trainers: loaded as modules that train, and written as transformers reads them."""
