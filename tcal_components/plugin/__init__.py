"""How torchtune's command line comes to know this project's recipes and configs."""
