-- For Lmod, after
--   python3 -m venv /sw/hpcpace/0.1.0 && /sw/hpcpace/0.1.0/bin/pip install hpcpace==0.1.0
--   mkdir /sw/hpcpace/0.1.0/command && ln -s ../bin/hpcpace /sw/hpcpace/0.1.0/command
local version = myModuleVersion()
local root = pathJoin(os.getenv("HPCPACE_MODULE_ROOT") or "/sw/hpcpace", version)

whatis("Name: hpcpace")
whatis("Version: " .. version)
whatis("Description: Traces, explains and paces distributed training on Slurm clusters")
help([[
Traces, explains and paces distributed training on Slurm clusters:
  hpcpace trace python train.py
  hpcpace report runs/NAME
Only its command comes into PATH, not its Python.
]])

-- A folder of the command alone: that of the venv would put its python before that of the job.
prepend_path("PATH", pathJoin(root, "command"))
