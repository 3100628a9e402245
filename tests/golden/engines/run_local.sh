$ /usr/bin/python3 -I -S /opt/torchmuster/programs/__main__.py agent --run-dir=/home/me/home/runs/r1 --place=0 --head=127.0.0.1:0
$ /usr/bin/python3 -I -S /opt/torchmuster/programs/__main__.py agent --run-dir=/home/me/home/runs/r1 --place=1 --head=127.0.0.1:0

# 2 workers: /usr/bin/python3 train.py --lr 'a b'
