import sys
from torchtune import config
from omegaconf import DictConfig
@config.parse
def recipe_main(cfg: DictConfig) -> None:
    print("hello", cfg, __file__)
if __name__ == "__main__":
    sys.exit(recipe_main())
