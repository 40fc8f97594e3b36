	.file	"<string>"
	.section	".note.GNU-stack","",@progbits
