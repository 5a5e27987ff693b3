# Written by `python tools/completions.py` from what the programs parse.
complete -c tidegate-governor -f
complete -c tidegate-governor -s h -l help -d 'show this help message and exit'
complete -c tidegate-governor -l config -r -F -d 'configuration file (/etc/tidegate/config.yaml)'
complete -c tidegate-governor -l runtime-dir -x -a '(__fish_complete_directories)' -d 'instead of the configuration\'s'
complete -c tidegate-governor -l state-dir -x -a '(__fish_complete_directories)' -d 'instead of the configuration\'s'
complete -c tidegate-governor -l driver-dir -x -a '(__fish_complete_directories)' -d 'instead of the configuration\'s'
complete -c tidegate-governor -l wait -d 'wait for another governor of the same directory to end, and take its place'
